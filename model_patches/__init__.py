"""Model repositories for `trust_remote_code`: each folder travels to the Hub and imports no hf_ext."""
