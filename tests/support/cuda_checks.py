"""What tests on a CUDA device share."""

import torch


def check_streams_and_graph(run, rounds=8):
    """run() gives tensors: the same ones call after call, on streams side by side, and where a graph replays it."""
    expected = [x.clone() for x in run()]
    streams, results = [torch.cuda.Stream() for _ in range(4)], []
    torch.cuda.synchronize()
    for stream in streams * rounds:
        with torch.cuda.stream(stream):
            results.append(run())
    torch.cuda.synchronize()
    for result in results:
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(result, expected, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for x in captured:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(captured, expected, strict=True))
