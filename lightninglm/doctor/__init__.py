"""
What stands in the way of a run: the machine and its installation, and the checkpoints of a run folder.

Needs torch, rich, psutil and packaging only, so that it can say which other packages are missing.
"""
