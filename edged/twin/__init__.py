"""The simulated board and the virtual clock. The product runs on them unchanged."""
