"""Webhooks: what is told to an address of the user's when a submitted call has ended.

1. whoever ends a call that has a webhook stores a job, the call's id, before the call's record (`gpufn_platform.queue.call_records`)
2. any gateway takes the job, reads the record, and posts what became of the call (`deliveries`, `letter`, `post`)
3. until the address has answered 2xx or the tries are used up, the job comes again (`tries`)
"""
