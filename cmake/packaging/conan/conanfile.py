"""Conan 2 recipe of the schedule side: conan create cmake/packaging/conan

It needs Boost's headers, from Conan's registry or, with `-pr:a default -pr:a cmake/packaging/conan/system_boost`, those of the system.
The run side is not in it: PyTorch's own wheels, which it needs, are not in that registry; install it with CMake."""
import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy, load


class Chevron(ConanFile):
    name = "chevron"
    description = "Pipeline-parallel training: schedules described, proved while compiling, and run on LibTorch"
    topics = ("pipeline-parallelism", "scheduling", "deep-learning", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _root(self):
        return os.path.normpath(os.path.join(self.recipe_folder, "..", "..", ".."))

    def set_version(self):
        header = load(self, os.path.join(self._root, "include", "chevron", "version.hpp"))
        self.version = ".".join(re.findall(r"#define CHEVRON_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))

    def export_sources(self):
        for pattern in ("CMakeLists.txt", "cmake/*", "include/*"):
            copy(self, pattern, self._root, self.export_sources_folder)

    def requirements(self):
        self.requires("boost/[>=1.74]", options={"header_only": True}, transitive_headers=True)

    def validate(self):
        check_min_cppstd(self, 20)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for off in ("CHEVRON_RUN", "CHEVRON_BUILD_TESTS", "CHEVRON_BUILD_EXAMPLES", "CHEVRON_BUILD_BENCH"):
            toolchain.cache_variables[off] = False
        toolchain.generate()

    def build(self):
        CMake(self).configure()  # nothing is compiled: it is headers

    def package(self):
        CMake(self).install()

    def package_id(self):
        self.info.clear()  # the same for every compiler

    def package_info(self):
        self.cpp_info.set_property("cmake_file_name", "chevron")
        self.cpp_info.set_property("cmake_target_name", "chevron::schedule")
        self.cpp_info.set_property("pkg_config_name", "chevron-schedule")
        self.cpp_info.bindirs = self.cpp_info.libdirs = []
        # Expanding and proving a large schedule takes more evaluator steps than compilers allow by default.
        steps = "-fconstexpr-steps=268435456" if "clang" in str(self.settings.get_safe("compiler")) else "-fconstexpr-ops-limit=268435456"
        self.cpp_info.cxxflags = [steps]
