"""What the compiler makes of every configuration of the bundled kernels, without a GPU. See run.py."""
