"""What torch calls: module hooks, saved-tensor hooks, gradient hooks."""
