"""Faults and kill points, by which tests strike a rank or a driver. Never set in a measurement."""
