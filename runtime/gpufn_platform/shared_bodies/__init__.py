"""Large request and response bodies in shared memory, passed by reference between processes of one host."""
