"""What a user uploaded and gets back processed: pictures, videos, sound."""
