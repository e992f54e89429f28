"""The thermal guard: readings in, Limits and lever targets out. Open policy.py first."""
