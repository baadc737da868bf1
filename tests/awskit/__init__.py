"""AWS for tests: moto's server for the calls, and a strict metadata service for spot notices."""
