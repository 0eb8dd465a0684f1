"""What `conan create` does at its end: the project of tests/consumer against the package that was just made."""
import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain


class Consumer(ConanFile):
    settings = "os", "arch", "compiler", "build_type"
    test_type = "explicit"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        self.folders.build = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "conan-consumer")
        self.folders.generators = os.path.join(self.folders.build, "generators")

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        toolchain.cache_variables["WAY"] = "package"
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=os.path.join(self.recipe_folder, "..", "..", "..", "..", "tests", "consumer"))
        cmake.build()

    def test(self):
        if can_run(self):
            self.run(os.path.join(self.build_folder, "consumer"), env="conanrun")
