"""A page that shows servers, tenants and sessions live, and the endpoint that serves it."""
