# Prints the Doxyfile, with the style of the reference where doxygen-awesome-css is installed.
cat docs/site/Doxyfile
style=/usr/share/doxygen-awesome-css/doxygen-awesome.css
if [ -f $style ]; then echo "HTML_EXTRA_STYLESHEET = $style docs/site/reference.css"; fi
