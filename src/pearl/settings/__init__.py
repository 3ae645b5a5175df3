"""What the user asked for, checked: configurations, recipes, and the parts that they name. No torch."""
