"""The ``xmoe`` command, cluster files and batch templates, installed as ``xmoe.launch``. Needs no torch to import."""
