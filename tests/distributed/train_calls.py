"""What ranks do with examples.train_parallel: some steps on a mesh, and on one rank from their checkpoint."""

import torch
from torch.distributed.device_mesh import init_device_mesh

from examples.train_parallel import AXES, Training

TEXT = (torch.arange(4000) * 37 % 251 % 97).to(torch.uint8)
_meshes = {}


def losses(rank, name, sizes, folder):
    """(on the mesh, on one rank, taken up): of three steps; after two the mesh saves, and one rank, and the mesh again,
    take the third from there."""
    if sizes not in _meshes:
        _meshes[sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
    ours, alone = (Training(name, mesh, TEXT, torch.float64) for mesh in (_meshes[sizes], None))
    found = [ours.step() for _ in range(2)]
    ours.save(folder)
    expected = [alone.step() for _ in range(2)]
    taken_up = []
    for mesh in (None, _meshes[sizes]):
        resumed = Training(name, mesh, TEXT, torch.float64)
        resumed.load(folder)
        taken_up.append(resumed.step())
    return [*found, ours.step()], [*expected, alone.step()], taken_up
