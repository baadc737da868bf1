"""Background work: sweeps, retention, erasure, and checks of files and the ledger.

Internal: may change without notice."""
