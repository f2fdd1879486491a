"""Logins of users at a gateway, through its OpenID provider."""
