"""What a server's device holds, what of it goes first when there is too little room, and how it comes back."""
