"""Large request and response bodies, shared by reference between processes of one host."""
