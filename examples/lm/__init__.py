"""Parts of the main job, one idea a file. `examples/train_lm.py` puts them together."""
