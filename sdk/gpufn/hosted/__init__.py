"""Code that was written for another platform, deployed as it is.

`cog`      a predictor of Replicate's cog
`runpod`   a handler of RunPod serverless

`gpufn deploy --as` adds a small module to the bundle. It makes the other platform's package importable, by a
replacement with the names that such code uses, and declares the function. Workers of other functions never see it.
"""
