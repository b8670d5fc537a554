"""Pages for people, which only read: what runs do, why they wait and what can be done."""
