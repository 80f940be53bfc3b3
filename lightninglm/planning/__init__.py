"""What a recipe will need before it runs: parameters, bytes per GPU, arithmetic, time, cost, disk."""
