"""Library: values that a program does not wait for, and a handler for logs of them."""
