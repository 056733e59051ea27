"""Side-by-side measurements against the peers: `hf-ext bench NAME` runs `hf_ext.benchmarks.NAME.run`."""
