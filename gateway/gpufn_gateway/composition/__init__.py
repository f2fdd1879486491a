"""Composition of the gateway: which objects it has, and what each of them gets.

services      connections and stores, opened in order
parts         objects built on them
routes        routes of the management API and the protocols
application   the ASGI application, with the console and gRPC
background    tasks that run until the gateway ends
"""
