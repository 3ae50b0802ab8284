"""One file or folder per question: request in, result out. Stores, resumes, stops; public from Python."""
