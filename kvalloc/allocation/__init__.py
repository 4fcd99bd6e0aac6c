"""Allocation: from a request to a problem, to a solved and verified budget profile."""
