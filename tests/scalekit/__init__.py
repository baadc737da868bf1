"""One tenant with as many ended jobs as wanted, and what each route then reads."""
