"""Real processes, real faults: what is left of every promise when things die."""
