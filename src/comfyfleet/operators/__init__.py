"""Operators: people who run the fleet, each with a key and a role."""
