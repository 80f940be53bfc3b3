"""What stands in the way of a run: the machine and its installation, and the checkpoints of a run folder."""
