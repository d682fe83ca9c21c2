"""Plain torch modules, dense and mixture-of-experts; knows no mesh."""
