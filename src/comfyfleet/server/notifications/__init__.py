"""Notifications: job events, webhooks to customers' servers, and the audit log.

Internal: may change without notice."""
