"""The demo: byte-level GPTs trained on real text with torch.ops.attnjourney.*. Start it with `make demo`.

To read it: attention.py (the four layers), model.py, train.py, generate.py (text with a cache). Beside them:
torch_attention.py (the layers to compare with), data.py, config.py, checkpoint.py, progress.py. The end of the job:
evaluate.py, checks.py, figures.py, sections.py, report.py.
demo.py is the command line, pipeline.py the order of things.
"""
