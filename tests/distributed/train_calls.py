"""What ranks do with examples.train_parallel: some steps on a mesh, and on one rank from their checkpoint."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from examples.train_parallel import AXES, Training

TEXT = (torch.arange(4000) * 37 % 251 % 97).to(torch.uint8)
_meshes = {}


def losses(rank, name, sizes, folder):
    """(on the mesh, of this rank alone, taken up): of three steps; after two the mesh saves, and the mesh again, and
    one rank, take the third from there. Of rank 0; the others leave out what is done alone."""
    if sizes not in _meshes:
        _meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    ours = Training(name, _meshes[sizes], TEXT, torch.float64)
    found = [ours.step() for _ in range(2)]
    ours.save(folder)
    taken_up = []
    for mesh in (_meshes[sizes], None)[: 1 if rank else 2]:
        resumed = Training(name, mesh, TEXT, torch.float64)
        resumed.load(folder)
        taken_up.append(resumed.step())
    found.append(ours.step())
    alone = None if rank else Training(name, None, TEXT, torch.float64)
    return found, [alone.step() for _ in range(3)] if alone else [], taken_up
