"""TurboConn beside its base: accuracy far beyond the trained lengths, cost, Jacobi's error. See run.py."""
