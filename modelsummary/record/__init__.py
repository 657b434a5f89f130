"""What a forward did, value by value: the calls of modules and functions of one run or several."""
