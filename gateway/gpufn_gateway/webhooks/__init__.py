"""Webhooks: POST requests to a user's address when a submitted call has ended.

1. the process that ends a call with a webhook stores a job, the call's id, before the call's record
   (`gpufn_platform.queue.records.call_records`)
2. a gateway takes the job, reads the record, and posts the outcome (`deliveries`, `payload`, `sender`)
3. the job is redelivered until the address answers 2xx or the retries are used up (`retry_policy`)
"""
