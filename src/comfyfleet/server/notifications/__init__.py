"""What happened: events of jobs, webhooks to customers' servers, and the audit log.

Internal: may change without notice.
"""
