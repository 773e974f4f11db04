"""The loop, the data, the measurements and the checkpoints of ``xmoe train``."""
