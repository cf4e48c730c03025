// Package docs holds the documents of the project. It has no code: its tests check that what the documents name exists.
package docs
