"""Does every requirement have a test that fails when its code is broken? ``make mutants`` breaks the code and looks."""
