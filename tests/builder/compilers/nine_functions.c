/* The nine functions that TensorRT's bindings link to, answered by the libraries of TensorRT-RTX. */
#include <dlfcn.h>
#include <stdlib.h>

static void *library(const char *name) {
    void *handle = dlopen(name, RTLD_NOW | RTLD_GLOBAL);
    if (!handle) abort();
    return handle;
}
static void *builder(const char *name) { return dlsym(library("libtensorrt_rtx.so.1"), name); }
static void *parser(const char *name) {
    library("libtensorrt_rtx.so.1");
    return dlsym(library("libtensorrt_onnxparser_rtx.so.1"), name);
}
static int builder_version(void) { return ((int (*)(void))builder("getInferLibVersion"))(); }

int getNvOnnxParserVersion(void) { return ((int (*)(void))parser("getNvOnnxParserVersion"))(); }

/* The bindings pass the version that they were made for; each library wants its own. */
void *createInferBuilder_INTERNAL(void *log, int version) {
    return ((void *(*)(void *, int))builder("createInferBuilder_INTERNAL"))(log, builder_version());
}
void *createInferRuntime_INTERNAL(void *log, int version) {
    return ((void *(*)(void *, int))builder("createInferRuntime_INTERNAL"))(log, builder_version());
}
void *createInferRefitter_INTERNAL(void *engine, void *log, int version) {
    return ((void *(*)(void *, void *, int))builder("createInferRefitter_INTERNAL"))(engine, log, builder_version());
}
void *createNvOnnxParser_INTERNAL(void *network, void *log, int version) {
    void *(*make)(void *, void *, int) = (void *(*)(void *, void *, int))parser("createNvOnnxParser_INTERNAL");
    return make(network, log, getNvOnnxParserVersion());
}
void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *log, int version) {
    void *(*make)(void *, void *, int) = (void *(*)(void *, void *, int))parser("createNvOnnxParserRefitter_INTERNAL");
    return make(refitter, log, getNvOnnxParserVersion());
}
void *getBuilderPluginRegistry(int capability) {
    return ((void *(*)(int))builder("getBuilderPluginRegistry"))(capability);
}
void *getPluginRegistry(void) { return ((void *(*)(void))builder("getPluginRegistry"))(); }
int initLibNvInferPlugins(void *log, const char *name) { return 1; }
