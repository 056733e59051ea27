"""MXFP4 formats side by side: losses of real language models, bits a weight, times; see `run` and `report`."""
