"""The control plane's API, one package per audience."""
