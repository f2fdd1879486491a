"""Routes of functions: deploys, revisions, builds, schedules."""
