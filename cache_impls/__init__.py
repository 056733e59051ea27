"""Key/value caches: subclasses of transformers' `Cache`, one folder per method."""
