"""Plans of the products with block-sparse (BSR) matrices."""
