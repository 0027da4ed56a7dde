//! Runs the parity cases on two directories from the command line: `cargo run -p nacre-testkit
//! --example parity NATIVE MOUNTED`. Both have to be empty and show the same file system. Used by
//! people who look into a difference, and on other file systems.

fn main() -> std::process::ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let (Some(native), Some(mounted)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: parity NATIVE MOUNTED");
        return std::process::ExitCode::from(2);
    };
    nacre_testkit::parity::compare(native.as_ref(), mounted.as_ref());
    println!("equal");
    std::process::ExitCode::SUCCESS
}
