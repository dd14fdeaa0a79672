//! The build script, run as cargo runs it: where it looks for nvcc, and what it does without one.

mod common;

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use common::{root, scratch};

/// The build script, compiled.
fn script() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let binary = scratch("kernel_build").join("build-script");
        let done = Command::new("rustc")
            .args(["--edition", "2024", "-o"])
            .arg(&binary)
            .arg(root().join("rust/lmcache-transfer/build.rs"))
            .status();
        assert!(done.expect("rustc starts").success());
        binary
    })
}

struct Case {
    folder: PathBuf,
    environment: Vec<(&'static str, PathBuf)>,
}

impl Case {
    fn new(name: &str) -> Self {
        let folder = scratch("kernel_build").join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(folder.join("out")).expect("scratch space");
        Self {
            folder,
            environment: Vec::new(),
        }
    }

    fn with(mut self, name: &'static str, value: impl Into<PathBuf>) -> Self {
        self.environment.push((name, value.into()));
        self
    }

    /// A stand-in for a program: prints `told`, and writes a word where nvcc would write a fatbin.
    fn program(&self, path: &str, told: &str) -> PathBuf {
        let path = self.folder.join(path);
        fs::create_dir_all(path.parent().expect("in a folder")).expect("scratch space");
        let text = format!(
            "#!/bin/sh\necho '{told}'\nfor word; do last=$word; done\ncase $last in *.fatbin) echo code > \"$last\";; esac\n"
        );
        fs::write(&path, text).expect("scratch space");
        let executable = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&path, executable).expect("ours");
        path
    }

    fn run(&self) -> Output {
        let mut command = Command::new(script());
        command.env_clear().env("OUT_DIR", self.folder.join("out"));
        command.env("CARGO_MANIFEST_DIR", root().join("rust/lmcache-transfer"));
        command.env("PATH", self.folder.join("nothing"));
        for (name, value) in &self.environment {
            command.env(name, value);
        }
        command.output().expect("the script starts")
    }

    /// The facts that a build with `run`'s outcome has.
    fn facts(&self) -> String {
        let done = self.run();
        assert!(
            done.status.success(),
            "{}",
            String::from_utf8_lossy(&done.stderr)
        );
        fs::read_to_string(self.folder.join("out/kernel_build.rs")).expect("always written")
    }
}

/// Those that have code of their own.
const ARCHITECTURES: [u32; 8] = [75, 80, 86, 89, 90, 100, 103, 120];
/// 20 that copy, 3 that rotate and 5 that zero.
const KERNELS: usize = 28;

const VERSION: &str = "Cuda compilation tools, release 13.0, V13.0.88";

#[test]
fn without_nvcc_the_build_has_no_kernels_and_says_why() {
    let case = Case::new("none");
    let facts = case.facts();
    assert!(
        facts.contains("nvcc: \"\"") && facts.contains("no nvcc on the PATH"),
        "{facts}"
    );
    let fatbin = fs::metadata(case.folder.join("out/kernels.fatbin")).expect("there, empty");
    assert_eq!(fatbin.len(), 0);
}

#[test]
fn a_wheel_that_must_have_kernels_does_not_come_without() {
    let done = Case::new("required")
        .with("LMCACHE_RS_REQUIRE_CUDA", "1")
        .run();
    assert!(!done.status.success());
    let told = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(
        told.contains("LMCACHE_RS_REQUIRE_CUDA is set") && told.contains("no nvcc"),
        "{told}"
    );
}

#[test]
fn nvcc_is_looked_for_on_the_path_then_in_cuda_home_then_among_packages() {
    let mut case = Case::new("order");
    let packages = case.folder.join("site-packages");
    case.program(
        "site-packages/nvidia/cu13/bin/nvcc",
        &VERSION.replace("88", "3"),
    );
    let python = case.program("python", packages.to_str().expect("plain"));
    case = case.with("PYO3_PYTHON", python);
    assert!(case.facts().contains("nvcc: \"13.0.3\""));

    case.program("cuda/bin/nvcc", &VERSION.replace("88", "2"));
    let home = case.folder.join("cuda");
    case = case.with("CUDA_HOME", home);
    assert!(case.facts().contains("nvcc: \"13.0.2\""));

    case.program("path/nvcc", &VERSION.replace("88", "1"));
    let path = case.folder.join("path");
    case = case.with("PATH", path);
    let facts = case.facts();
    assert!(
        facts.contains("nvcc: \"13.0.1\"") && facts.contains("120"),
        "{facts}"
    );
    let fatbin = fs::read_to_string(case.folder.join("out/kernels.fatbin"));
    assert_eq!(fatbin.expect("written by nvcc"), "code\n");

    let refused = case.with("LMCACHE_RS_WITHOUT_CUDA", "1").facts();
    assert!(
        refused.contains("LMCACHE_RS_WITHOUT_CUDA is set"),
        "{refused}"
    );
}

/// The nvcc of PyPI's packages, as the interpreter that cargo was given knows them.
fn packaged() -> Option<(PathBuf, PathBuf)> {
    #[expect(
        clippy::disallowed_methods,
        reason = "make tells which interpreter by it"
    )]
    let python = std::env::var_os("PYO3_PYTHON").unwrap_or_else(|| "python3".into());
    let told = Command::new(&python)
        .args(["-c", "import sys; print(*sys.path, sep='\\n')"])
        .output()
        .ok()?;
    let told = String::from_utf8_lossy(&told.stdout).into_owned();
    let places = told
        .lines()
        .map(|folder| Path::new(folder).join("nvidia/cu13/bin/nvcc"));
    let nvcc = places.into_iter().find(|place| place.is_file())?;
    Some((python.into(), nvcc))
}

/// A PATH with what nvcc itself calls, a C++ compiler and its tools, and nothing else: no toolkit of the system's.
fn compilers_alone() -> PathBuf {
    let folder = scratch("kernel_build").join("compilers");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("scratch space");
    for name in ["sh", "gcc", "g++", "cpp", "as", "ld", "rm", "cat"] {
        let places = ["/usr/local/bin", "/usr/bin", "/bin"].map(Path::new);
        let found = places
            .iter()
            .map(|place| place.join(name))
            .find(|place| place.exists());
        if let Some(found) = found {
            symlink(found, folder.join(name)).expect("scratch space");
        }
    }
    folder
}

#[test]
fn the_packages_alone_compile_every_architecture_without_a_spill() {
    let Some((python, nvcc)) = packaged() else {
        #[expect(
            clippy::disallowed_methods,
            reason = "make tells by it whether the packages must be there"
        )]
        let required = std::env::var("LMCACHE_RS_PACKAGED_NVCC").is_ok_and(|word| !word.is_empty());
        assert!(
            !required,
            "Python has no nvcc among its packages: `pip install -r requirements/nvcc.txt` into it"
        );
        println!("not tried: Python has no nvcc among its packages (requirements/nvcc.txt)");
        return;
    };
    // No CUDA_HOME, and no nvcc on the PATH: the packages' own is what is found.
    let bare = compilers_alone();
    let case = Case::new("packages")
        .with("PYO3_PYTHON", python)
        .with("PATH", &bare)
        .with("LMCACHE_RS_REQUIRE_CUDA", "1");
    let facts = case.facts();
    assert!(
        facts.contains("[75, 80, 86, 89, 90, 100, 103, 120]"),
        "{facts}"
    );
    let fatbin = fs::metadata(case.folder.join("out/kernels.fatbin")).expect("compiled");
    assert!(
        (100_000..8_000_000).contains(&fatbin.len()),
        "{} bytes",
        fatbin.len()
    );

    // The same once more, to hear of registers and memory on every architecture.
    let mut command = Command::new(nvcc);
    command.args(["--fatbin", "-std=c++17", "-O3", "--threads=2", "-Xptxas=-v"]);
    for arch in ARCHITECTURES {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    command
        .arg("-I")
        .arg(root().join("csrc"))
        .arg(case.folder.join("out/kernels.cu"))
        .arg("-o")
        .arg(case.folder.join("out/again.fatbin"))
        .env("PATH", &bare)
        .env_remove("CUDA_HOME");
    let done = command.output().expect("nvcc starts");
    let told = String::from_utf8_lossy(&done.stderr).into_owned();
    let frames: Vec<&str> = told
        .lines()
        .filter(|line| line.contains("bytes stack frame"))
        .collect();
    assert_eq!(frames.len(), KERNELS * ARCHITECTURES.len(), "{told}");
    for frame in frames {
        assert_eq!(
            frame.trim(),
            "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"
        );
    }
    let registers = told
        .split("Used ")
        .skip(1)
        .filter_map(|rest| rest.split(' ').next()?.parse::<u32>().ok());
    println!("at most {:?} registers", registers.max());
}
