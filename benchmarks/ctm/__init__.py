"""CtM and its peers: four real adapters merged into one, kept energy, time and memory of a layer."""
