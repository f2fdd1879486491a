"""The message bus. All traffic between gpufn processes goes through this package; no other module knows NATS.

connection      one Bus per process: publish, subscribe, request, JetStream requests, automatic reconnects
tcp_connection, nats_protocol, nats_py  the connection itself; jetstream: JetStream requests and responses
typed_handler   subscription handlers that decode their messages
storage         streams, key-value buckets and the object store
leader_lease    leader election
node_claim      one agent, runner and builder per node name
roles           NATS permissions per role
server_check    whether gpufn can run on a server
"""
